"""Rewards: functions of what an episode said and did."""
