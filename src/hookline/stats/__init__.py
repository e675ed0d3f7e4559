"""Statistics of many tensors at once, on their device: the one path for activations and gradients.

`statistics.summarize` gives one row per tensor; `collector` gathers tensors while a model runs, to read them together;
`flush` brings rows to the host without waiting; `histograms` counts values and reads percentiles from the counts;
`merging` makes the row of a whole from those of its parts; `pieces` measures tensors of every kind as whole ones, with
`shards` for those that are cut over ranks; `norms` gives norms and nothing else.
"""
