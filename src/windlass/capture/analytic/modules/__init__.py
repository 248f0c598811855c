"""The modules of a transformer as one tensor-parallel rank runs them.

They mirror `models.modules`, `models.tensor_parallel.parallel_modules` and the shards of
`models.tensor_parallel.shard_params`, expression by expression: a variable that holds a tensor
longer, or an argument that is replaced, changes the memory that is counted.
"""
