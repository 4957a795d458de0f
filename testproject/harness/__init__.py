"""What the demo and the tests share: processes that are killed, a broker, marks, and the count of effects.

Nothing here uses Django, the package or pytest:

- ``processes``: a ``Daemon`` is a program that is started, killed and started again. It never outlives its owner.
- ``redis``: a broker that comes with a wheel. RabbitMQ is in ``tests/harness``, because only tests need it.
- ``marks``: a process leaves a mark on disk before it kills itself, so counting files counts the kills.
- ``effects``: compares what should have happened with what has happened, counted where effects happen. It is the one
  judge of effects: of the demo and of all tests that kill, freeze or interleave.
"""
