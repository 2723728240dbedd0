"""The doctor: whether batch norm will hurt a federation, and what to use instead, told from a few steps at each client."""

from polyfed.studies.doctor.examine import Diagnosis as Diagnosis
from polyfed.studies.doctor.examine import examine as examine
from polyfed.studies.doctor.findings import Finding as Finding
