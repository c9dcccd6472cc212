-- Statements about elections: who does what is done once for all daemons. A row lease, not a session lock: it ends by
-- itself, whatever became of its holder's connection.


-- To be elected, or to stay so. A row comes back for the holder only. While another holds it, nothing is written and no
-- row is locked: that is what all the others do all day. The clock is read again when the row's lock is held.
-- name: stand
insert into tasklib.elections as election (name, holder, term, until)
select $1::text, $2::text, 1, clock_timestamp() + $3::double precision * interval '1 second'
 where not exists (select from tasklib.elections
                    where name = $1::text and holder <> $2::text and until > clock_timestamp())
on conflict (name) do update
    set holder = excluded.holder, until = clock_timestamp() + $3::double precision * interval '1 second',
        term = election.term + (election.holder <> excluded.holder or election.until < clock_timestamp())::integer
    where election.holder = excluded.holder or election.until < clock_timestamp()
returning term;


-- The holder leaves: the next one need not wait.
-- name: resign
update tasklib.elections set until = clock_timestamp() where name = $1::text and holder = $2::text;
