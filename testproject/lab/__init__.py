"""The retry lab: a page on which visitors pay over a bad network, with and without protection, and compare the effects.

``views`` contains the page and its endpoints. The scripts are in ``static/lab``: ``pay-once.js`` is reusable in front
ends, and ``lab.js`` is the lab itself.
"""
