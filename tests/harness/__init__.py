"""The harness for the crash matrix, the delivery tests and the contrib packages' tests.

The lower layer is ``testproject/harness``, which the demo shares: daemons, Redis, marks and effect counts. This package
contains only what tests need:

- ``zygote``: a process that has loaded Django once, and its ``Fork``s, which start in milliseconds. A fork and the test
  communicate through a ``Channel``; a fork can be killed, frozen, woken and waited for.
- ``strikes``: a ``Strike`` defines the place and the message at which a process dies or is held. The process strikes
  itself, so each strike hits the intended moment and happens as often as planned. ``keeper`` restarts dead processes.
- ``proxy``: one proxy for PostgreSQL, RabbitMQ and Redis that cuts connections and drops a broker's confirm.
- ``rabbitmq``, ``mariadb``, ``pgbouncer``: private servers; ``postgres`` kills and promotes one, and ``disk`` cuts its
  power.
- ``answers``: the handlers' random responses, and how judges read them back.
- ``history``: the clients' requests and responses, and whether one record for each key explains them.
- ``world``: a database, two providers and a zygote, shared by all cells or scripts of a run. Assertions read through
  connections that are independent of the package.

A suite then has three parts: what its processes do (``tests/crash/worker.py``, ``tests/delivery/roles.py``), what is
done to them (``cells.py``, ``faults.py``), and what must hold afterwards. An ``ImpossibleError`` means that the harness
could not carry out a step, which is a failure and never a pass.
"""
