"""The plugin's former place: `pytest_plugins = ["tasklib.pytest_plugin"]` goes on working.

pytest finds `tasklib_pytest` by itself. There the fixtures are, and to name it here a second time does nothing.
"""

from __future__ import annotations

pytest_plugins = ["tasklib_pytest"]
