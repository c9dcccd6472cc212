-- Raises if the queue has no row, and a submit to such a queue is refused. Names the queues whose names are most like it: those that
-- share the most pairs of letters.
create or replace function tasklib.refuse_unknown_queue(queue text) returns void
    language plpgsql stable
    set search_path = pg_catalog, pg_temp
as $$
declare
    near text;
begin
    if exists (select from tasklib.queues where queues.name = refuse_unknown_queue.queue)
       or (select refuses_unknown_queues from tasklib.policy) is not true
    then
        return;
    end if;
    select string_agg(quote_literal(like_it.name), ', ' order by shared desc, like_it.name) into near
      from (select known.name::text as name, count(*) as shared
              from tasklib.queues as known,
                   generate_series(1, length(known.name) - 1) as place
             where strpos(refuse_unknown_queue.queue, substr(known.name, place, 2)) > 0
             group by known.name
            having count(*) * 2 >= length(known.name) - 1
             order by shared desc, known.name
             limit 3) as like_it;
    raise exception 'there is no queue %', quote_literal(refuse_unknown_queue.queue) using
        errcode = 'TL404',
        hint = coalesce('Did you mean ' || near || '? ', '') || format(
            'If it is a new queue, create it: select tasklib.ensure_task_queue(%L).', refuse_unknown_queue.queue);
end
$$;
revoke all on function tasklib.refuse_unknown_queue(text) from public;
