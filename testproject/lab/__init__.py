"""The retry lab: a page where a visitor pays over a bad network, protected and not, and sees what comes of it.

``views`` has the page and its endpoints. The scripts are in ``static/lab``: ``pay-once.js`` is the pattern for front
ends, and ``lab.js`` is the lab itself.
"""
