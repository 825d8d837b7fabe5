"""From a name to a model that runs: the only package that imports Transformers' modelling code."""
