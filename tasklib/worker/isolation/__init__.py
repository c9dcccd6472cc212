"""Tasks with a process of their own: `@task(isolation="process")`, and suspects, where their worker offers that.

    worker  --->  fork server  --->  one process for each execution

The fork server is an interpreter with the tasks' modules and without threads. It forks a process for each execution.
It is not a fork of the running worker, because no thread, lock or database connection survives a fork.

    processes.py         the worker's side: it runs an execution in a process, and returns the outcome
    process.py           the worker's side: one such process; suspect_limits.py when it is killed
    fork_server_link.py  the worker's side: the fork server
    launching.py         how a fork server is started
    fork_server.py       the fork server itself
    run.py               the execution, inside its process
    protocol.py          what the three say to each other
"""
