"""A PostgreSQL whose disk loses all unsynced data when the power is cut.

Its files are on a separate ext4 file system, in a file behind a loop device. ``EXT4_IOC_SHUTDOWN`` ends a file system
at once: the page cache is never written, as in xfstests. That needs root and a loop device.
"""

import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from testproject.embedded import SOCKET_NAME, embedded_postgres
from tests.harness.postgres import Server
from tests.harness.world import migrate
from tests.harness.zygote import ImpossibleError, wait_until

SHUTDOWN, WITHOUT_LOG = 0x8004587D, struct.pack("I", 2)  # linux/fs/ext4/ext4.h
CAN_CUT = os.geteuid() == 0 and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4") is not None


class ServerOnADisk(Server):
    """A server that a power cut restarts."""

    def __init__(self, url, mounted, image):
        super().__init__(url)
        self._mounted, self._image = mounted, image
        os.sync()  # the installation must survive

    def _stop_disk(self):
        root = os.open(self._mounted, os.O_RDONLY)
        fcntl.ioctl(root, SHUTDOWN, WITHOUT_LOG)
        os.close(root)

    def restart(self):
        unsynced = self._mounted / "unsynced"
        unsynced.write_text("never on the disk")
        self.kill()
        unmount(self._mounted)
        mount(self._image, self._mounted)
        # Its name may exist, because a sync of another file has committed it to the journal.
        if unsynced.exists() and unsynced.read_text():
            raise ImpossibleError("the disk has kept unsynced data")
        # The killed server may be a zombie, for which a new one would wait. After a boot there are no zombies.
        for lock in ("data/postmaster.pid", f"{SOCKET_NAME}.lock"):
            (self.directory / lock).unlink(missing_ok=True)
        self.start()


def mount(image, place):
    subprocess.run(["mount", "-o", "loop", image, place], check=True)


def unmount(place):
    """Unmount. Killed processes may keep files open for a moment."""
    wait_until(lambda: subprocess.run(["umount", place], check=False, capture_output=True).returncode == 0, "umount")


@contextmanager
def server_on_a_disk():
    """A server with the tables."""
    with tempfile.TemporaryDirectory(prefix="disk-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)  # for the server's user
        image, mounted = Path(directory, "image"), Path(directory, "mounted")
        mounted.mkdir()
        with image.open("wb") as file:
            file.truncate(1 << 30)  # in bytes; the file is sparse
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
        mount(image, mounted)
        with ExitStack() as stack:
            stack.callback(unmount, mounted)
            with mock.patch.object(tempfile, "tempdir", str(mounted)):
                url = stack.enter_context(embedded_postgres())
            migrate(url)
            yield ServerOnADisk(url, mounted, image)
