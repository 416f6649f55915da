"""The D side: the scheduler submits and cancels, each worker registers its caches and reports."""
