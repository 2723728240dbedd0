"""Predict from a few steps per client whether batch norm will hurt a federation, and recommend a method."""

from polyfed.studies.doctor.examine import Diagnosis as Diagnosis
from polyfed.studies.doctor.examine import examine as examine
from polyfed.studies.doctor.findings import Finding as Finding
