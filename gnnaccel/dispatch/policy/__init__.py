"""Choices of the user and results of earlier measurements: configuration, rules, reasons, names of
layers, pinned and tuned decisions, calibrated rates.
"""
