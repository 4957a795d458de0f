"""What the demo and the test harness share: processes that are killed, a broker, strikes, and the count of effects.

Nothing here knows of Django, of the package or of pytest. A run that breaks things on purpose is made of these parts:

- ``processes``: a ``Daemon`` is a program that is started, killed and started again. Whatever happens to its owner, it
  never outlives it. A ``Keeper`` starts a process again that has died, as a process manager does.
- ``redis``: the one broker that comes with a wheel. RabbitMQ is in ``tests/harness``, because only tests need it.
- ``strikes``: a ``Strike`` says at which place and with which message a process dies or is held. The process strikes
  itself, and leaves a mark on disk first. So each strike hits the moment that it is meant for, happens as often as it
  is planned, and is counted by counting files.
- ``effects``: what should have happened is compared with what has happened, counted where effects happen. The crash
  matrix, the deliveries and the demo are all judged by it.

The upper part is ``tests/harness``: forks of a process that has loaded Django, a proxy, and databases of their own.
"""
