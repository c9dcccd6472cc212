-- The options of a raw INSERT that it leaves out: as the task's function says, else as its queue says, else as the library does. The
-- library itself always says all of them, and whether the task is ready: for its rows only the WHEN clause is evaluated, and
-- tasklib.submit has looked at the queue. A raw INSERT that gives everything is not looked at either.
-- Fires before `task_defaults`, by its name. Security definer, so that who may insert a task need not be able to read
-- what functions there are.
create or replace function tasklib.function_defaults() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    said tasklib.task_functions;
    of_queue tasklib.queues;
begin
    select * into said from tasklib.task_functions where task_functions.name = new.name;
    new.queue := coalesce(new.queue, said.queue, 'default');
    select * into of_queue from tasklib.queues where queues.name = new.queue;
    if not found then
        perform tasklib.refuse_unknown_queue(new.queue);
    end if;
    new.audited := coalesce(new.audited, nullif(of_queue.audit, false));
    new.priority := coalesce(
        new.priority, case when coalesce('priority' = any(said.own), true) then said.priority end,
        of_queue.default_priority, said.priority, 0);
    new.max_retries := coalesce(
        new.max_retries, case when coalesce('max_retries' = any(said.own), true) then said.max_retries end,
        of_queue.default_max_retries, said.max_retries, 3);
    new.timeout_seconds := nullif(coalesce(
        new.timeout_seconds, case when coalesce('timeout_seconds' = any(said.own), true) then said.timeout_seconds end,
        of_queue.default_timeout_seconds, said.timeout_seconds), 'infinity');
    new.deadline_at := coalesce(new.deadline_at, new.created_at + said.deadline_seconds * interval '1 second');
    new.store_result := coalesce(new.store_result, said.store_result, true);
    new.on_crash := coalesce(new.on_crash, nullif(said.on_crash, 'retry'));
    return new;
end
$$;
revoke all on function tasklib.function_defaults() from public;

create or replace trigger function_defaults before insert on tasklib.tasks
    for each row when (
        new.ready is null or new.queue is null or new.priority is null or new.max_retries is null
        or new.store_result is null)
    execute function tasklib.function_defaults();
