"""Two pages: the orders, and the admin."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from .views import create_order

urlpatterns = [path("orders/", create_order), path("admin/", admin.site.urls)]
