"""What a table of millions of records costs: its size, its log, its purge and its pages in the admin.

``python -m tests.scale`` prints the tables of ``docs/explanation/growth.md``. The instruments are those of
``tests.benchmarks``.
"""
