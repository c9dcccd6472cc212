"""An application for daemons under test."""
