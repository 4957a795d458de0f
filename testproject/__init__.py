"""A small payments API that shows the package at work, and that its demo and tests drive."""
