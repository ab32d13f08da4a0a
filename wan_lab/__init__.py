"""Calibration of MagCache and sparse attention, and comparisons of their videos with the full run.

python -m wan_core calibrate --model tiny
python -m wan_core quality --model tiny --setting speed:careful --setting taylorseer:2 --count 24
"""
