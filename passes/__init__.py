"""The passes: each file one public function `verb_noun(gm, request) -> gm`."""
