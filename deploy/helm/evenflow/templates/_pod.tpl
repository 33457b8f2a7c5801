{{/* What every pod of the stack has. */}}
{{- define "evenflow.podBasics" -}}
enableServiceLinks: false
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "evenflow.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Of [root, role]: where a process of the stack writes, and its certificate. */}}
{{- define "evenflow.mounts" -}}
- {name: scratch, mountPath: /tmp, subPath: tmp}
- {name: scratch, mountPath: /home/evenflow, subPath: home}
{{- if ne (index . 0).Values.certificates.mode "off" }}
- {name: {{ index . 1 }}-tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "evenflow.volumes" -}}
- name: scratch
  emptyDir: {}
{{- end }}

{{- define "evenflow.certificateVolume" -}}
{{- $root := index . 0 }}
{{- if ne $root.Values.certificates.mode "off" }}
- name: {{ index . 1 }}-tls
  secret:
    secretName: {{ include "evenflow.name" $root }}-{{ index . 1 }}-tls
    defaultMode: 0440
{{- end }}
{{- end }}

{{/* Of [root, service, names of callers]: what all services are told. */}}
{{- define "evenflow.commonEnv" -}}
{{- $root := index . 0 }}
{{- $prefix := printf "EVENFLOW_%s" (index . 1 | upper) -}}
- {name: {{ $prefix }}_HOST, value: 0.0.0.0}
- {name: {{ $prefix }}_GRPC_KEEPALIVE_S, value: {{ $root.Values.grpcKeepaliveSeconds | quote }}}
{{- if ne $root.Values.certificates.mode "off" }}
- {name: {{ $prefix }}_TLS_CERT_FILE, value: /tls/tls.crt}
- {name: {{ $prefix }}_TLS_KEY_FILE, value: /tls/tls.key}
- {name: {{ $prefix }}_TLS_CA_FILE, value: /tls/ca.crt}
{{- with index . 2 }}
- {name: {{ $prefix }}_TLS_CLIENT_NAMES, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/* Of [service, settings]. Whole numbers that YAML reads as floats are written as whole ones. */}}
{{- define "evenflow.settings" -}}
{{- $service := index . 0 | upper }}
{{- range $name, $value := index . 1 }}
- name: EVENFLOW_{{ $service }}_{{ $name }}
  value: {{ include "evenflow.scalar" $value | quote }}
{{- end }}
{{- end }}

{{- define "evenflow.scalar" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{/* Of [root, port]: asks grpc.health.v1, with the process's own certificate where there is one. */}}
{{- define "evenflow.healthProbe" -}}
{{- if eq (index . 0).Values.certificates.mode "off" -}}
grpc: {port: {{ index . 1 }}}
{{- else -}}
exec:
  command: [python, -m, services.kit.probe, "127.0.0.1:{{ index . 1 }}", --ca, /tls/ca.crt, --cert, /tls/tls.crt, --key, /tls/tls.key]
{{- end }}
timeoutSeconds: 5
periodSeconds: 10
{{- end }}

{{/* Of [root, a workload's values]: where its pods may run. */}}
{{- define "evenflow.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- end }}
