"""Forwards that need not run: which ones, as pure functions of a plan, and the residuals that stand in for them.

A policy takes a `Plan` and gives a `Plan` back in which steps are marked (`magcache`, `taylorseer`, `guidance`,
`adaptive`); `skipping` applies those a user asked for, in order. `residual` turns the marks into what is stored and
what is read at each step, and is a runner around the blocks (`wan_core.models.wan.runners`) while a phase runs. What a
skipped step costs is the patch embedding, one sum and the head.
"""
