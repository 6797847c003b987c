"""Speech as text: what a form with sound asks, doing it window by window, and how it is answered."""

from __future__ import annotations

from server.speech.answers import Heard, answer
from server.speech.requests import SpeechRequest, parse_speech
from server.speech.work import SpeechWork

__all__ = ["Heard", "SpeechRequest", "SpeechWork", "answer", "parse_speech"]
