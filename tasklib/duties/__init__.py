"""Work that is done for all workers by any process. Each duty is a class with `run_once`, and is safe to run twice at
once.
"""
