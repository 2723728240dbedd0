"""The doctor: whether batch norm will hurt a federation, and what to use instead, told from a few steps at each client."""

from polyfed.diagnosis.examine import Diagnosis as Diagnosis
from polyfed.diagnosis.examine import examine as examine
from polyfed.diagnosis.findings import Finding as Finding
