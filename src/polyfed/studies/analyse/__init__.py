"""Analyse trained runs, without changing them, to explain why a method works.

``polyfed.analyse`` and ``polyfed analyse`` take run folders; the functions here take an experiment (``result.experiment``).
"""

from polyfed.studies.analyse.analyse import Analyses as Analyses
from polyfed.studies.analyse.confidence import confidence as confidence
from polyfed.studies.analyse.features import feature_similarity as feature_similarity
from polyfed.studies.analyse.features import tsne as tsne
from polyfed.studies.analyse.gradient_bias import gradient_bias as gradient_bias
from polyfed.studies.analyse.gradient_bias import gradient_bias_of as gradient_bias_of
from polyfed.studies.analyse.kinds import KINDS as KINDS
from polyfed.studies.analyse.local_models import layer_spread as layer_spread
from polyfed.studies.analyse.local_models import states_after_training as states_after_training
from polyfed.studies.analyse.local_models import states_as_tested as states_as_tested
from polyfed.studies.analyse.norm_statistics import norm_statistics as norm_statistics
from polyfed.studies.analyse.norm_statistics import score_with as score_with
from polyfed.studies.analyse.norm_statistics import union_statistics as union_statistics
from polyfed.studies.analyse.rounds import noted as noted
from polyfed.studies.analyse.rounds import statistics_drift as statistics_drift
from polyfed.studies.analyse.score_grid import score_grid as score_grid
