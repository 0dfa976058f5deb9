"""The laboratory: tasks, training, evaluation, inspections, benchmarks and studies of models with a
recurrence.

The library beside it (`pathways`, `solvers`, `depth`, `host`, `models`) knows nothing of it.
"""
