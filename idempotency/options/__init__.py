"""The options of an operation: declared once in ``table``; ``values`` holds what some of them take."""
