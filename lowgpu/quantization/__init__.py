"""Policies in int8: calibrated after training, compared with their originals, saved and served.

`calibration.calibrate`, `report.compare`, `policy.QuantizedPolicy`, `onnx_export.onnx_model`. Nothing is
imported here, so that the command line stays quick.
"""
