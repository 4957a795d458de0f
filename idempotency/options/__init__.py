"""The options of an operation. ``table`` declares them, and ``values`` defines the values that some of them take."""
