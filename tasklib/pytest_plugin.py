"""The plugin's former place: `pytest_plugins = ["tasklib.pytest_plugin"]` goes on working.

pytest finds the fixtures in `tasklib_pytest` by itself; naming that module a second time, here, does nothing.
"""

from __future__ import annotations

pytest_plugins = ["tasklib_pytest"]
