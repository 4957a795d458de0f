"""The options of an operation, the entries of ``IDEMPOTENCY``, and the values that some of them take."""
