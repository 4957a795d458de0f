"""What the crash matrix, the deliveries and the tests of the contrib packages run on.

The lower part is ``testproject/harness``, which the demo shares: daemons, Redis, marks, the count of effects. Here is
what only tests need:

- ``zygote``: a process that has loaded Django once, and the ``Fork``s of it, which take milliseconds to start. A fork
  and the test talk through a ``Channel``; a fork can be killed, frozen, woken and waited for.
- ``strikes``: a ``Strike`` says at which place and with which message a process dies or is held. The process strikes
  itself, so each strike hits the intended moment and happens as often as planned. ``keeper`` restarts the dead.
- ``proxy``: one proxy for PostgreSQL, RabbitMQ and Redis, that cuts connections and swallows a broker's confirm.
- ``rabbitmq``, ``mariadb``, ``pgbouncer``: servers of one's own; ``postgres`` kills and promotes one, and ``disk`` cuts
  its power.
- ``answers``: what handlers answer, which is drawn, and what judges read of it again.
- ``history``: what clients sent and were answered, and whether one record for each key explains it.
- ``world``: a database, two providers and a zygote, which all cells or scripts of a run share. What a test asserts is
  read through connections that know nothing of the package.

A suite is then three things: what its processes do (``tests/crash/worker.py``, ``tests/delivery/roles.py``), what is
done to them (``cells.py``, ``faults.py``), and what must hold afterwards. An ``ImpossibleError`` says that the harness
could not do what was asked of it, which is a failure and never a pass.
"""
