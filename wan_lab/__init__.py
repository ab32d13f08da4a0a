"""Calibration of MagCache and sparse attention, and comparisons of their videos with the full run.

python -m wan_core calibrate --model tiny
python -m wan_core quality --model tiny --setting magcache:0.24/1/0.1 --setting taylorseer:2/1 --count 24
"""
