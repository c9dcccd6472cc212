"""A shop that sends receipts in the background. With DATABASE_URL set:

python manage.py migrate
python manage.py test
python manage.py runserver
python manage.py tasklib_worker    # in another terminal
curl -d email=alice@example.com http://127.0.0.1:8000/orders/
"""

from __future__ import annotations

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
    execute_from_command_line(sys.argv)
