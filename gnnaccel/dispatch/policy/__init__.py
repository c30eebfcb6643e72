"""What the user asked for and what was found out beforehand: configuration, rules, reasons,
names of layers, pinned and tuned decisions, calibrated rates.
"""
