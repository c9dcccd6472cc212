"""The settings of the project under test."""

from __future__ import annotations

import os

from psycopg import conninfo

_given = conninfo.conninfo_to_dict(os.environ["DATABASE_URL"])
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _given["dbname"],
        "USER": _given.get("user"),
        "HOST": _given.get("host"),
        "PORT": _given.get("port"),
    }
}
INSTALLED_APPS = [
    "tasklib.django",  # first, on purpose: its ready() runs before those of the others
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "tests.django_project",
]
TASKLIB = {"BASE_RETRY_DELAY_SECONDS": 0.0, "MAX_RETRIES": 2}
TASKS = {"default": {"BACKEND": "tasklib.django.TasklibBackend", "QUEUES": ["default", "mail"]}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LOGGING_CONFIG = None  # the tests' own is left alone
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
ROOT_URLCONF = "tests.django_project.urls"
SECRET_KEY = "not a secret"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "django.template.context_processors.request",
            ]
        },
    }
]
ALLOWED_HOSTS = ["testserver"]
USE_TZ = True
