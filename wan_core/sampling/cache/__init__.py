"""Step caching: policies as pure functions of a plan, and the cached residuals.

A policy takes a `Plan` and returns a `Plan` with marked steps (`magcache`, `policies`);
`skipping` applies the requested ones in order. `residual` turns the marks into what is stored and
what is read at each step, and is a runner around the blocks (`wan_core.models.wan.runners`) while a phase runs. A
skipped step costs the patch embedding, one sum and the head.
"""
