"""An ordinary project; tasklib needs the app, and nothing else."""

from __future__ import annotations

import os

from psycopg.conninfo import conninfo_to_dict

database = conninfo_to_dict(os.environ["DATABASE_URL"])
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": database["dbname"],
        "USER": database.get("user"),
        "PASSWORD": database.get("password"),
        "HOST": database.get("host"),
        "PORT": database.get("port"),
    }
}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "tasklib.django",
    "shop",
]
TASKLIB = {"MAX_RETRIES": 5, "BASE_RETRY_DELAY_SECONDS": 10}

ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
DEBUG = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
ROOT_URLCONF = "shop.urls"
SECRET_KEY = "for development only"  # noqa: S105 - it says so
STATIC_URL = "static/"
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
USE_TZ = True
