"""Analyses of trained runs: experiments that ask why a method works.

They look at models, statistics, gradients and answers, and leave a run as it is; some take a few steps of local training and throw them
away. ``polyfed.analyse`` and ``polyfed analyse`` do all of them for run folders; the functions here take an experiment
(``result.experiment``) and give numbers.
"""

from polyfed.studies.analyse.analyse import Analyses as Analyses
from polyfed.studies.analyse.confidence import confidence as confidence
from polyfed.studies.analyse.feature_similarity import feature_similarity as feature_similarity
from polyfed.studies.analyse.gradient_bias import gradient_bias as gradient_bias
from polyfed.studies.analyse.gradient_bias import gradient_bias_of as gradient_bias_of
from polyfed.studies.analyse.kinds import KINDS as KINDS
from polyfed.studies.analyse.local_models import layer_spread as layer_spread
from polyfed.studies.analyse.local_models import states_after_training as states_after_training
from polyfed.studies.analyse.local_models import states_as_tested as states_as_tested
from polyfed.studies.analyse.norm_statistics import norm_statistics as norm_statistics
from polyfed.studies.analyse.rounds import noted as noted
from polyfed.studies.analyse.rounds import statistics_drift as statistics_drift
from polyfed.studies.analyse.score_grid import score_grid as score_grid
from polyfed.studies.analyse.tsne import tsne as tsne
from polyfed.studies.analyse.union_statistics import score_with as score_with
from polyfed.studies.analyse.union_statistics import union_statistics as union_statistics
