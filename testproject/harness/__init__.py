"""Shared by the demo and the tests. Uses neither Django nor the package nor pytest.

- ``processes``: a ``Daemon`` is a program that can be started, killed and restarted. It never outlives its owner.
- ``redis``: a Redis broker from a wheel. RabbitMQ is in ``tests/harness``, because only tests need it.
- ``marks``: a process leaves a file before it kills itself, so counting files counts the kills.
- ``effects``: compares expected and actual effects, for the demo and for all tests that kill, freeze or interleave.
"""
