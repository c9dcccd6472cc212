"""What has to be done for all workers, by any of them: each is a class with `run_once`. Two at once do no harm."""
