"""The web child: serves health, status and metrics over HTTP."""
