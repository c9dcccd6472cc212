# The daemon, and nothing of an application. An image of yours adds its code, and is what kubernetes/ runs:
#
#     FROM tasklib
#     USER root
#     COPY . /opt/shop
#     RUN pip install /opt/shop
#     USER 10001:10001
#
# Built from the source tree: docker build -t tasklib .

ARG PYTHON=3.13

FROM python:${PYTHON}-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/src
COPY pyproject.toml constraints.txt README.md LICENSE tasklib_pytest.py ./
COPY tasklib tasklib
COPY daemon daemon
RUN python -m venv /opt/tasklib \
    && /opt/tasklib/bin/pip install --constraint constraints.txt ".[binary,daemon]"

FROM python:${PYTHON}-slim-bookworm
# libpq asks for the name of who connects, so the user has one; Kubernetes wants its number.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin tasklib
COPY --from=build /opt/tasklib /opt/tasklib
ENV PATH=/opt/tasklib/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8642
HEALTHCHECK --start-period=60s CMD ["tasklibd", "status", "--json"]
# The exec form: the daemon is process 1, gets the signals, and reaps what others leave behind.
ENTRYPOINT ["tasklibd"]
CMD ["run"]
