"""A process killed at a system call duplicates nothing and loses nothing. ``--count 1`` kills at every call."""

import shutil

import pytest

from tests.crash.calls import JOBS, kill_at_each_call
from tests.harness.zygote import ImpossibleError
from tests.results import recording

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace: tests/servers.sh install strace")

#: The reduced run kills at each so many-th call, beginning with another one each time.
STRIDE = 16


@pytest.mark.parametrize("job", JOBS)
def test_a_kill_at_any_system_call_doubles_and_loses_nothing(shared, job, count, seed):
    kills = kill_at_each_call(shared, job, stride=count or STRIDE, first=seed)

    figures = {"kills": kills.calls, "fired": kills.fired, "violations": len(kills.problems)}
    with recording("calls", job=job, database=shared.vendor, seed=seed, **figures):
        assert not kills.problems, "\n".join(kills.problems)
        assert kills.fired > 0
        # A run may need a call less than the one that was traced, and so never come to the last ones.
        assert kills.calls - kills.fired <= max(1, kills.calls // 5)


@pytest.mark.postgres
def test_a_completion_on_its_own_is_found(shared):
    """Even without a kill: a client gets "not-recorded", and its retry a replay."""
    with pytest.raises(ImpossibleError, match=r"undisturbed, the request fails: .*no record explains"):
        kill_at_each_call(shared, "request", mutations=["completion_on_its_own"])
