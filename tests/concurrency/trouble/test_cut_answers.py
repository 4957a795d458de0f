"""The response to a message of several statements is cut off at each byte."""

import os
import select

import pytest
from django.contrib.auth import get_user_model
from django.db import OperationalError

from idempotency import claim
from idempotency.exceptions import UnavailableError
from testproject.models import Transfer
from tests.aliases import another_alias
from tests.harness.proxy import CHUNK, Proxy

# On Citus, BEGIN, the statements, the settings and COMMIT are separate messages.
pytestmark = [pytest.mark.postgres, pytest.mark.except_citus, pytest.mark.django_db(transaction=True)]


class CuttingProxy(Proxy):
    """Cuts the connection when this many bytes of the answer to a message have reached the client."""

    #: Bytes that identify the message.
    marker = b""
    #: None lets everything through.
    keeps: int | None = None
    #: The length of the answer to the last such message.
    length = 0

    def _pass_on(self, client, server):
        is_due = False
        while self._closed not in (ready := select.select([client, server, self._closed], [], [])[0]):
            if server in ready:
                answer = server.recv(CHUNK)
                if is_due:
                    self.length = len(answer)
                    if self.keeps is not None:
                        client.sendall(answer[: self.keeps])
                        return
                is_due = False
                client.sendall(answer)
                if not answer:
                    return
            if client in ready:
                data = client.recv(CHUNK)
                if not data:
                    return
                is_due = self.marker in data
                server.sendall(data)


@pytest.fixture
def proxy(transactional_db, monkeypatch):
    """Records of operations named ``cut.…`` are reached over it."""
    get_user_model().objects.create(pk=1, username="alice")
    with CuttingProxy(os.environ["DATABASE_URL"]) as proxy, another_alias(monkeypatch, "cut", proxy.url):
        yield proxy


def attempt(number):
    with claim("cut.answers", account_id="1", key=str(number)) as run:
        if not run.replayed:
            Transfer.objects.using("cut").create(account_id=1, amount=1, label=str(number))
            run.result = number
    return run.replayed


def cut_at_each_byte(proxy, marker):
    """Yield numbers of operations. Each gets one byte more of the answer than the operation before."""
    proxy.marker = marker
    attempt(-1)
    for kept in range(proxy.length):
        proxy.keeps = kept
        yield kept


def effects(number):
    return Transfer.objects.filter(label=str(number)).count()


def test_a_completion_whose_answer_is_cut_off_never_counts_as_failed(proxy):
    """The server has committed before it sends the first byte."""
    for number in cut_at_each_byte(proxy, b"idempotency.completed"):
        with pytest.raises(UnavailableError, match="did not confirm the commit"):
            attempt(number)
        proxy.keeps = None
        assert attempt(number), "the outcome was not kept"
        assert effects(number) == 1
    assert proxy.length > 50


def test_a_first_statement_whose_answer_is_cut_off_has_no_effect(proxy):
    for number in cut_at_each_byte(proxy, b"BEGIN; INSERT"):
        with pytest.raises(OperationalError):
            attempt(number)
        assert effects(number) == 0
        proxy.keeps = None
        assert not attempt(number)
        assert effects(number) == 1
    assert proxy.length > 50
