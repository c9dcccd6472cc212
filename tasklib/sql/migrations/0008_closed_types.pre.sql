-- Who may use a type can make operators on it, and `queue = $1` prefers an operator on exactly these types, in whatever
-- schema of the search_path, to PostgreSQL's own on text: it would run with the rights of who asks. Values need no such
-- right: this is about new functions, operators, casts and columns alone. A role that makes a view or a table with these
-- types casts to text and jsonb, or is granted usage.
revoke usage on domain
    tasklib.task_name, tasklib.queue_name, tasklib.task_key, tasklib.task_tags, tasklib.moment, tasklib.task_args,
    tasklib.task_kwargs
    from public;
revoke usage on type tasklib.runner from public;

-- For what is submitted: a value that a domain refuses is named alone, while the table's own CHECK and NOT NULL put the
-- whole row, with its arguments, into PostgreSQL's log. They say the same as those, for every value of a submit that has
-- one.
create domain tasklib.given_name as text not null;
create domain tasklib.given_retries as integer constraint max_retries_whole check (value >= 0);
create domain tasklib.given_timeout as double precision
    constraint timeout_positive check (value > 0 and value <= 3153600000);
create domain tasklib.given_crash_policy as text constraint on_crash_known check (value in ('retry', 'fail'));
revoke usage on domain
    tasklib.given_name, tasklib.given_retries, tasklib.given_timeout, tasklib.given_crash_policy
    from public;
