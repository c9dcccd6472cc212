"""The daemon that runs tasks in production: supervisor, workers, keeper and web.

`tasklib` never imports this package. The folder above it has no `__init__.py`,
because `daemon` is the import name of python-daemon.
"""
