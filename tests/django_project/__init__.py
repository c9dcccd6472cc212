"""A small Django project: one app, which is the project itself. DATABASE_URL names its database."""
