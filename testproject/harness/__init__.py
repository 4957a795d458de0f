"""What the demo and the test harness share: processes that are killed, a broker, strikes, and the count of effects.

Nothing here uses Django, the package or pytest. A run that breaks things on purpose consists of these parts:

- ``processes``: a ``Daemon`` is a program that is started, killed and started again. It never outlives its owner. A
  ``Keeper`` restarts processes that have died, as a process manager does.
- ``redis``: a broker that comes with a wheel. RabbitMQ is in ``tests/harness``, because only tests need it.
- ``strikes``: a ``Strike`` says at which place and with which message a process dies or is held. The process strikes
  itself, and leaves a mark on disk first. So each strike hits the intended moment and happens as often as planned, and
  counting files counts the strikes.
- ``effects``: compares what should have happened with what has happened, counted where effects happen. The crash
  matrix, the deliveries and the demo all use it.

``tests/harness`` is built on this: forks of a process that has loaded Django, a proxy, and databases.
"""
