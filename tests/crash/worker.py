"""The process that a cell breaks: one job, with one point armed, controlled through a channel.

The process is a fork of the zygote, so it has Django loaded and no connection open. It dies without cleanup: a cell
has only its earlier messages, the rows it left in the database, and the provider's ledger.
"""

import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from http.client import HTTPConnection
from unittest import mock
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.conf import settings
from django.db import close_old_connections, connections, transaction
from django.http import JsonResponse
from django.test import AsyncClient, Client
from django.urls import path
from psycopg.waiting import Wait
from rest_framework.decorators import api_view, authentication_classes, permission_classes

from idempotency import PARK, REEXECUTE, Completed, NotExecuted, Operation, Reconcile, idempotent, require_claim
from idempotency.operate.purge import purge_batches
from idempotency.operate.sweep import recover_batches
from idempotency.operation import registry
from idempotency.protocol import faults
from idempotency.store.postgresql import PostgreSQLStore
from testproject.harness.marks import Marks
from testproject.models import Transfer
from testproject.provider.client import find
from tests.crash.mutations import MUTATIONS
from tests.crash.points import WITH_ROWS
from tests.harness import answers
from tests.harness.history import CALL_HEADER, Call
from tests.harness.zygote import PATIENCE

AMOUNT = 100


def run(spec, channel):
    """Called in each fork."""
    Worker(channel, spec).run()


class BrokenError(Exception):
    """The fault "an exception", or the handler's failure in cells about releasing a claim."""


class Worker:
    def __init__(self, channel, spec):
        self.channel = channel
        self.spec = spec
        threading.excepthook = lambda arguments: None  # a heartbeat broken on purpose needs no report
        self.declaration = spec["declaration"]
        #: The kind of view: plain, drf or async.
        self.kind = spec.get("kind", "plain")
        self.lease = spec.get("lease", 30.0)
        #: Set once the handler waits for the broken heartbeat. A process frozen earlier might hold SQLite's write lock.
        self.waiting = threading.Event()
        self.beaten = threading.Event()
        self._fired = False
        self._passes = Counter()

    def run(self):
        database = connections["default"].settings_dict
        if self.spec.get("database"):  # a separate file for each cell, on SQLite
            database["NAME"] = self.spec["database"]
        elif connections["default"].vendor == "postgresql":
            database["OPTIONS"]["application_name"] = self.spec.get("session", self.spec["operation"])[:63]
            if level := self.spec.get("level"):
                database["OPTIONS"]["isolation_level"] = psycopg.IsolationLevel[level]
        if skew := self.spec.get("skew"):
            true_time = time.time
            time.time = lambda: true_time() + skew
        for name in self.spec.get("mutations", ()):
            MUTATIONS[name](pytest.MonkeyPatch())
        self._declare()
        self._arm()
        job = getattr(self, self.spec["job"])
        try:
            done = job()
        except Exception as error:  # noqa: BLE001 - it is reported to the cell, which judges it
            done = {"crashed": repr(error)}
        self.channel.tell(event="done", **done)
        connections.close_all()

    # Faults

    def _arm(self):
        # The harness's points, in addition to the package's.
        own = ("on_commit", "handler.wrote", "downstream.sent", "downstream.answered", "reconciler.asked")
        faults.fault_point.update(dict.fromkeys(own, lambda: None))
        arms = {
            "commit.sent": self._arm_commit, "complete.sent": self._arm_commit, "claim.unanswered": self._arm_claim
        }  # fmt: skip
        for point, fault, *passes in self.spec.get("arms", ()):
            if arm := arms.get(point):
                arm(point, fault)
            else:
                faults.fault_point[point] = partial(self._strike, point, fault, *passes)

    def _strike(self, point, fault, passes=0):
        """Cause the fault once, after ``passes`` harmless passes."""
        self._passes[point] += 1
        if self._fired or self._passes[point] <= passes:
            return
        self._fired = True
        if point == "heartbeat.before":
            assert self.waiting.wait(PATIENCE), "the handler doesn't wait for a heartbeat"
        self.channel.tell(event="reached", point=point, session=self._session() if fault == "drop" else None)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop":
            # The signal stops every thread, this one perhaps a moment later than another.
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault in {"kill", "stop", "gate", "drop"}:
            self.channel.wait()
        self.beaten.set()
        if fault == "raise":
            raise BrokenError(point)

    def _session(self):
        """The id of this thread's database session, which the cell will end.

        Behind a pooler, this cuts the thread's connection to the pooler, and returns the client's port.
        """
        connection = connections["default"]
        connection.ensure_connection()
        if self.spec["pooled"]:
            with socket.socket(fileno=os.dup(connection.connection.pgconn.socket)) as link:
                port = link.getsockname()[1]
                link.shutdown(socket.SHUT_RDWR)
            return port
        if connection.vendor == "postgresql":
            return connection.connection.info.backend_pid
        return connection.connection.thread_id() if connection.vendor == "mysql" else None

    def _arm_commit(self, point, fault):
        """Strike when the first COMMIT of an outcome is sent and not yet answered. At ``complete.sent``, strike before
        it is sent, if it isn't one message with the completing update.
        """
        connection = connections["default"]
        commit = connection._commit
        due = []

        def end(send):
            if not due:
                return send()
            due.clear()
            if point == "complete.sent":
                self._strike(point, fault)
                return send()
            if connection.vendor == "postgresql":
                with self._striking_before_the_answer(connection.connection, point, fault):
                    return send()
            answer = send()  # one call of a library both sends and ends it
            self._strike(point, fault)
            return answer

        def wrapper(execute, sql, *rest):
            send = partial(execute, sql, *rest)
            commits_itself = sql.rstrip().endswith("COMMIT") or connection.get_autocommit()
            return end(send) if commits_itself else send()

        faults.fault_point["complete.before"] = lambda: due.append(True)
        connection._commit = lambda: end(commit)
        connection.execute_wrappers.append(wrapper)

    def _arm_claim(self, point, fault):
        """Strike when the first claim is sent, before its answer is read."""
        insert = PostgreSQLStore.insert_claim

        def insert_struck(store, *arguments, **options):
            with self._striking_before_the_answer(store.connection.connection, point, fault):
                return insert(store, *arguments, **options)

        PostgreSQLStore.insert_claim = insert_struck

    @contextmanager
    def _striking_before_the_answer(self, driver, point, fault):
        """Strike when the block's first message is sent, before its answer is read."""
        wait = driver.wait

        def wait_struck(steps, *bounds):
            return wait(self._struck_at_first_read(steps, driver, point, fault), *bounds)

        with mock.patch.object(driver, "wait", wait_struck):
            yield

    def _struck_at_first_read(self, steps, driver, point, fault):
        """psycopg's steps of a statement. All of it is sent when psycopg first waits for reading only."""
        ready = None
        while True:
            try:
                wanted = steps.send(ready)
            except StopIteration as done:
                return done.value
            if wanted is Wait.R:
                self._strike(point, fault)
                if fault == "drop":
                    driver.pgconn.finish()  # the answer may be in the socket already, and must not be read
                    raise psycopg.OperationalError("server closed the connection unexpectedly")
            ready = yield wanted

    # The operation

    @property
    def label(self):
        """The client's label of the operation, by which effects are counted."""
        return self.spec.get("label", self.spec["key"])

    def _declare(self):
        heartbeat = self.spec.get("heartbeat")
        policy = {
            "account": lambda request: request.headers["X-Account"],
            "lease": timedelta(seconds=self.lease),
            "heartbeat": None if heartbeat is None else timedelta(seconds=heartbeat),
            **answers.DECLARED,
        }
        policy |= {
            "inside": {},
            "again": {"transaction": False, "recovery": REEXECUTE},
            "begun": {"transaction": False, "recovery": REEXECUTE},
            "ask": {"transaction": False, "recovery": Reconcile(self._find_out)},
            "park": {"transaction": False, "recovery": PARK},
        }[self.declaration]
        registry._operations.clear()  # a sweep in this process must find only the cell's operation
        view = sync_to_async(self._handle) if self.kind == "async" else self._handle
        view = idempotent(Operation.declare(self.spec["operation"], **policy))(view)
        if self.kind == "drf":
            view = api_view(["POST"])(authentication_classes([])(permission_classes([])(view)))
        settings.ROOT_URLCONF = (path("operate/", view),)

    def _handle(self, request):
        claim = require_claim()
        label = self.label
        # Before the step, so that the provider refuses the late call of a process that freezes in it.
        valid_until = time.time() + self.lease
        if self.declaration != "begun":
            self._write(claim, label)
        if any(point == "heartbeat.before" for point, *_ in self.spec.get("arms", ())):
            self.waiting.set()
            assert self.beaten.wait(PATIENCE), "no heartbeat"

        def call():
            return self._call(str(claim.derive_key("payout")), label, valid_until)

        if self.spec["provider"] is None:
            payout = None
        elif self.declaration == "inside" or self.spec.get("stepless"):
            payout = call()
        else:
            payout = claim.step("payout", call)
        if self.declaration == "begun":
            if not self.spec.get("without_begin"):
                claim.begin()
            self._write(claim, label)
        if self.spec.get("fail"):
            raise BrokenError
        kind = answers.draw(self.spec["answers"], self.spec["draw"] + claim.attempt)
        return answers.answer(claim, kind, call=request.headers[CALL_HEADER], payout=payout)

    def _write(self, claim, label):
        with transaction.atomic():
            transaction.on_commit(lambda: faults.fault_point["on_commit"]())
            if self.declaration in WITH_ROWS:
                Transfer.objects.create(account_id=1, label=label, amount=AMOUNT, recipient=f"attempt {claim.attempt}")
            else:  # outside the record's transaction, a local write must be repeatable
                Transfer.objects.get_or_create(label=f"note of {label}", defaults={"account_id": 1, "amount": AMOUNT})
        faults.fault_point["handler.wrote"]()

    def _call(self, key, label, valid_until):
        with closing(HTTPConnection(urlsplit(self.spec["provider"]).netloc, timeout=PATIENCE)) as provider:
            body = {"label": label, "amount": AMOUNT}
            if self.declaration == "ask" and not self.spec.get("without_deadline"):
                body["valid_until"] = valid_until
            provider.request("POST", "/payouts", json.dumps(body), {"Idempotency-Key": key})
            faults.fault_point["downstream.sent"]()
            answer = provider.getresponse()
            paid = json.loads(answer.read())
            faults.fault_point["downstream.answered"]()
        if answer.status != 201:
            raise BrokenError(paid)
        return paid["id"]

    def _find_out(self, record):
        effect = find(self.spec["provider"], str(record.derive_key("payout")), timeout=PATIENCE)
        faults.fault_point["reconciler.asked"]()
        if effect is None:
            return NotExecuted()
        return Completed(JsonResponse({"attempt": record.attempt, "payout": effect.id}, status=201))

    # Jobs

    def request(self):
        is_async = self.kind == "async"
        client = (AsyncClient if is_async else Client)(raise_request_exception=False)
        post = async_to_sync(client.post) if is_async else client.post
        sent = {"id": self.spec.get("call", uuid4().hex), "key": self.spec["key"], "start": time.monotonic()}
        answer = post(
            "/operate/",
            {"label": self.label},
            content_type="application/json",
            headers={"Host": "localhost", "Idempotency-Key": sent["key"], "X-Account": "1", CALL_HEADER: sent["id"]},
        )
        call = Call.answered(
            end=time.monotonic(), headers=answer.headers, status=answer.status_code, body=answer.content, **sent
        )
        is_problem = answer.headers.get("Content-Type") == "application/problem+json"
        return {
            "status": answer.status_code,
            "body": answer.content.decode(),
            "code": json.loads(answer.content)["code"] if is_problem else None,
            "replayed": "Idempotency-Replayed" in answer.headers,
            "call": str(call),
        }

    def storm(self):
        """One operation after the other, each retried until its outcome is known. On a stop request, each once more."""
        marks, count = Marks(self.spec["marks"]), 0
        faults.fault_point["handler.wrote"] = partial(self._freeze_if_marked, marks)
        while not self.channel.has_something():
            self._ask_until_known(count, marks)
            count += 1
        self.channel.wait()
        for number in range(count):
            self._ask_until_known(number, marks)
        self.channel.tell(event="redelivered")
        return {}

    def _freeze_if_marked(self, marks):
        mark = marks.directory / f"freeze.{os.getpid()}"
        if mark.exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)

    def _ask_until_known(self, number, marks):
        """Retry one operation until it has its outcome or is parked. Each operation draws another kind of outcome."""
        self.spec["key"] = f"{self.spec['prefix']}-{number}"
        self.spec["draw"] = number
        while True:
            answer = self.request()
            marks.note(f"calls.{self.declaration}", answer["call"])
            if answers.facts_of(answer["body"]) or answer["code"] == "idempotency_outcome_unknown":
                return
            time.sleep(0.01)  # a client's pause before its retry; nothing is ordered by it
            close_old_connections()  # servers do this between requests; Django's test client doesn't

    def sweep(self):
        return {"swept": next(recover_batches()).as_dict()}

    def purge(self):
        return {"purged": next(purge_batches()).deleted}
