-- Sets what holds for all queues: how many tasks execute at one time in the whole cluster (null: no cap), and whether a submit to a
-- queue that has no row is refused. A key that is left out stays as it is.
--
--     select tasklib.set_cluster('{"cluster_wide_cap": 200}', 'the database is small');
create or replace function tasklib.set_cluster(policy jsonb, reason text default null, actor text default null)
    returns tasklib.policy
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    before tasklib.policy;
    after tasklib.policy;
begin
    if set_cluster.policy - array['cluster_wide_cap', 'refuses_unknown_queues'] <> '{}' then
        raise exception 'unknown key in set_cluster' using
            errcode = 'TL400', hint = 'Known keys: cluster_wide_cap, refuses_unknown_queues.';
    end if;
    if set_cluster.policy ->> 'cluster_wide_cap' is not null then
        perform tasklib.use_feature('policies');
    end if;
    select * into before from tasklib.policy for update;
    after := jsonb_populate_record(before, set_cluster.policy);
    after.refuses_unknown_queues := coalesce(after.refuses_unknown_queues, false);
    if after = before then
        return before;
    end if;
    update tasklib.policy
       set cluster_wide_cap = after.cluster_wide_cap, refuses_unknown_queues = after.refuses_unknown_queues;
    perform tasklib.ring('*');
    perform tasklib.note_transition(
        'set_cluster', null, null, tasklib.changed_keys(to_jsonb(before), to_jsonb(after)),
        tasklib.changed_keys(to_jsonb(after), to_jsonb(before)), set_cluster.reason, set_cluster.actor);
    select * into after from tasklib.policy;
    return after;
end
$$;
revoke all on function tasklib.set_cluster(jsonb, text, text) from public;
